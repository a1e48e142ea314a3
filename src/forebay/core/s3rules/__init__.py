"""S3's rules: signatures, names, conditions, tags, forms. Pure, and shared by the S3 API and the native one."""
