"""`headrace doctor`: what this machine has, whether a model can be served on it, and what to do where it can't.

`gather` looks at the machine and gives `Facts`; the checks are functions of facts, so that tests can make them up.
"""
