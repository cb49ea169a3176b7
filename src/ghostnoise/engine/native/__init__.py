"""The C++ operators of the CPU: their sources, and the library that `setup.py` compiles from them."""
