"""Other libraries' function names and layouts over octile's operators, so that their users can change one import."""
