-- Reads the holders of a shared name, and the number of waiters.
--
-- KEYS    1  the set of the holders
--         2  the queue, unless its slot moves
-- Answer  { the number of waiters, or -1 without the queue; the server's clock in ms; each member (holders.lua) and its end }

local time = redis.call('TIME')
local ms = time[1] * 1000 + math.floor(time[2] / 1000)
local waiting = -1
if KEYS[2] then
  -- As in inspect.lua.
  local alive = redis.call('ZCOUNT', KEYS[2], '-inf', '(' .. -ms)
  waiting = alive > 0 and redis.call('ZCOUNT', KEYS[2], 0, '+inf') or 0
end
return { waiting, ms, redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ms, '+inf', 'WITHSCORES') }
