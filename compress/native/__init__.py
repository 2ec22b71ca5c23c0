"""The library of C++ code for this machine's processor, its loops over columns, and walks of trellises."""
