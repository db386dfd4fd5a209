"""One module a figure or table: `study(context)` measures it and says what it found."""
