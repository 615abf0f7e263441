"""Device code that kernels share: pieces of tiles, products and loops. It needs triton."""
