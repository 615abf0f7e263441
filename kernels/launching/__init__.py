"""Host code that launchers share: argument checks, block sizes, and cheap starts of kernels."""
