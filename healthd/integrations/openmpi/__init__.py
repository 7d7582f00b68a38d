"""Open MPI: jobs that mpirun starts."""
