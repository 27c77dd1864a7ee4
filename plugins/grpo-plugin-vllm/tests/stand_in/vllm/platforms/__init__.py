class Gpu:
    def is_cpu(self):
        return False


current_platform = Gpu()
