class LocalEngine: pass
