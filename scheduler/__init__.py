"""The scheduler takes requests and decides which executor runs each, and when. It never imports torch."""
