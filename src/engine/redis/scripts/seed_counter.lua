-- Raises the last fencing token of all names to the server's clock, if it is smaller. A later INCRBY then gives a larger token
-- than every token that was granted before the key was lost, or before a failure that lost its last changes.
--
-- KEYS    1  the key of the last token
-- Answer  the last token

local now = redis.call('TIME')
local fence = now[1] .. string.format('%06d', now[2])
local last = redis.call('GET', KEYS[1])
if last and tonumber(last) >= tonumber(fence) then
  return tonumber(last)
end
redis.call('SET', KEYS[1], fence)
return tonumber(fence)
