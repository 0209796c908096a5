-- Holds whose lease has run out, at most ARGV[3] of them, changing nothing.
-- ARGV: now_us, epoch, most

if is_lost() then
  return {'lost'}
end
return {'overdue', redis.call('ZRANGEBYSCORE', keys.leases, '-inf', text(now_us), 'LIMIT', 0, ARGV[3])}
