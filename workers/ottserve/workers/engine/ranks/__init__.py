"""One engine over several GPUs of a host: rank 0 decides, samples and answers, the others compute along."""
