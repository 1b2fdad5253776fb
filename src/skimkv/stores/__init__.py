"""Which bytes exist: a store is the cache of one layer, and three kinds of store serve all methods.

`Full` keeps every token, `Slots` keeps a budget of tokens, `Clusters` keeps samples of clusters.
"""
