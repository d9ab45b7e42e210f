"""Does a plan by measured residuals beat the uniform schedule and the AMO paper's plan?"""
