"""The engines, each in its contestant's process. Those of libraries need neither Pagewire nor its dependencies."""
