"""Load tests of a running service over gRPC. Knows the client alone; locust spawns the callers."""
