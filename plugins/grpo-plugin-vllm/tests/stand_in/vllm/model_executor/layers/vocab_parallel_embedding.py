class UnquantizedEmbeddingMethod:
    pass
