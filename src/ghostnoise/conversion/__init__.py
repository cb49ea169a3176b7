"""Conversion of the layers of any model to methods of this library, and back."""
