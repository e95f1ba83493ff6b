"""Training loops of other libraries, some on two processes. Skipped without the library: `make hosts`."""
