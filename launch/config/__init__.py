"""Configurations: what a TOML file and the command line may say, and how mistakes are answered.

Imports the library's own configurations, and nothing else of ``launch``.
"""
