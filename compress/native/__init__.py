"""The C++ library for this machine's processor, its loops over columns, and trellis paths."""
