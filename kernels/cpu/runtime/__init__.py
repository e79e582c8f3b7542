"""The C++ library: how it is compiled, loaded and called."""
