"""Bytes on a disk: hashes, seals, strict reading, and files that survive a crash whole."""
