/* GNUstep's headers want the GNUstep runtime's header of this name; gcc's runtime has none. */
#include <Block.h>
