"""One round in five pure functions, propose, plan, verify, accept, commit, and the fixed-slot runner that drives
them.
"""
