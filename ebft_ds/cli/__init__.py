"""The command line. Wiring only; `ebft-ds --help` imports no torch."""
