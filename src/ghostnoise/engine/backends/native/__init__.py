"""The passes on CPUs, in C++."""
