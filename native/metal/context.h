// What the Objective-C files share. The C handles of metal.h are these objects.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include "metal.h"

@interface FerrumContext : NSObject {
   @public
    id<MTLDevice> device;
    id<MTLCommandQueue> queue;
    id<MTLLibrary> library;
    id<MTLBinaryArchive> archive;  // nil: not used, or not supported here
    NSURL *archiveURL;
    BOOL archiveChanged;
    char name[128];
}
@end

@interface FerrumCommands : NSObject {
   @public
    id<MTLCommandBuffer> buffer;
    id<MTLComputeCommandEncoder> encoder;
    metal_pipeline *bound;  // the encoder's current pipeline
}
@end

// Formats into a message of the C face.
void ferrum_metal_fail(metal_message *message, NSString *format, ...) NS_FORMAT_FUNCTION(2, 3);

// Loads the shaders, and the archive of pipelines if `archive` names one; NO and a message if there are no shaders.
BOOL ferrum_metal_load(FerrumContext *context, const char *archive, metal_message *message);
