class UnquantizedLinearMethod:
    pass
