"""The steps of running jobs, which their ranks report."""
