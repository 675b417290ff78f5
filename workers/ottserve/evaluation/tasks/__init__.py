"""Tasks that a cache policy may lose while its KL looks small: each a module, all behind `task.Task`."""
