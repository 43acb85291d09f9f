-- Lets the last token of all be no smaller than the server's clock says. What a plain INCRBY makes of it is larger then than
-- every token that was given out before the key was lost, or before a failure that took its last changes with it.
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
