import os


class Gpu:
    def is_cuda(self):
        return True

    def has_device_capability(self, capability):
        return int(os.environ.get("STAND_IN_CAPABILITY", "90")) >= capability

    def is_cpu(self):
        return False

    def is_xpu(self):
        return False


current_platform = Gpu()
