"""Other libraries' names and layouts over octile's operators, so that code written for them switches by one import."""
