"""Histories of runs, and the judge, who reads nothing else."""
