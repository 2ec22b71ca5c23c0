"""Steps of a model that are recorded once, and then run by the C++ library without Python."""
