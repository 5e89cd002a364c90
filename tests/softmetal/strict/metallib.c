// The device as it opens where the build had Apple's tools: with a compiled library instead of the source.
#include <stdio.h>

#include "../../../native/metal/metal.h"

const unsigned char ferrum_shader_source[] = "";
const unsigned char ferrum_metallib[] = "MTLB and the rest";
const unsigned long long ferrum_metallib_size = sizeof(ferrum_metallib);

int main(void) {
    metal_options options = {NULL};
    metal_message message = {""};
    metal_context *context = metal_open(&options, &message);
    metal_pipeline *pipeline = context ? metal_pipeline_new(context, "strict_copy", 0, &message) : NULL;
    printf("%s\n", pipeline ? metal_name(context) : message.text);
    metal_pipeline *none = context ? metal_pipeline_new(context, "strict_nothing", 5, &message) : NULL;
    printf("%s\n", none ? "made" : message.text);
    if (pipeline) metal_pipeline_release(pipeline);
    if (context) metal_close(context);
    return 0;
}
