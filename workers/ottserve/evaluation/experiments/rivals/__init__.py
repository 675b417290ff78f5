"""Rival methods, each from the idea of its paper and none from its code; every file says what it simplifies."""
