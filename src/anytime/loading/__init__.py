"""Models and inputs for programs: any folder that this library writes, and images, arrays and texts as batches for it."""
