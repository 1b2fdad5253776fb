"""The C++ backend: the library (ctypes), stores as its structures, and the operations."""
