"""The queue, the policy that empties it, and the life of accepted requests until their streams end."""
