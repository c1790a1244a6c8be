"""Tests of the program package: no torch, no processes, except where torch's own parser is the reference."""
