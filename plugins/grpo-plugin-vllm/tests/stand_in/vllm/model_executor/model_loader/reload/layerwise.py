class Info:
    load_numel_total = None

    def reset(self):
        self.load_numel_total = None

    def can_load(self):
        return self.load_numel_total is not None


INFOS = {}


def get_layerwise_info(layer):
    return INFOS.setdefault(layer, Info())
