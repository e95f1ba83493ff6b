"""What other libraries need to know of the backend: a module for each of them. None is imported by `import
fp8compile`."""
