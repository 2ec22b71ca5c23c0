"""The library of C++ code for this machine's processor, and its loops over columns."""
