"""Commands for people: serving everything at once, checking and training the tiny model.

May import every other package; none imports this one.
"""
