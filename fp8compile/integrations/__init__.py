"""What other libraries need to know of the backend: a module for each. `import fp8compile` imports none."""
