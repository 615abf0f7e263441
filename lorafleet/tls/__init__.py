"""TLS for services and clients: files that may be replaced, credentials of gRPC, what a failure means."""
