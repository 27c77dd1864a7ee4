class Gpu:
    def is_cpu(self):
        return False

    def is_xpu(self):
        return False


current_platform = Gpu()
