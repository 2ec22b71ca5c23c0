"""The library of C++ code for this machine's processor."""
