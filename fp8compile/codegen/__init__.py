"""From our operators to what Inductor compiles. Knows no passes."""
