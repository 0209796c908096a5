-- Prolongs leases; never shortens one, never revives a hold.
-- ARGV: now_us, lease_us, request ids

local until_us = text(now_us + tonumber(ARGV[2]))
for i = 3, #ARGV do
  redis.call('ZADD', keys.leases, 'XX', 'GT', until_us, ARGV[i])
end
return 'OK'
