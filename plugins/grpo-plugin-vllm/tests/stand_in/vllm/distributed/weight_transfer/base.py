class WeightTransferInitInfo:
    pass


class WeightTransferUpdateInfo:
    pass


class WeightTransferEngine:
    def __class_getitem__(cls, kinds):
        return cls

    def __init__(self, model, model_config, device):
        self.model, self.model_config, self.device = model, model_config, device

    def parse_update_info(self, given):
        return self.update_info_cls(**given)
